"""Using an exported model without a federation: at one machine, of whoever has the file, its card and examples.

model_file   what a file of a model says of itself; writing the header, and building the model again
calibration  temperature, conformal sets and the threshold of "none of the classes", from a hospital's own examples
inputs       image files, tables and data by reference as examples with names
predictor    probabilities, sets and "none of the classes" for each of them
classifier   `consilium.load`: a model in scikit-learn's form
commands     `consilium calibrate`, `predict` and `page`; output: predictions as CSV, as JSON and for people
page/        the page for images
portable     a model as ONNX and as a program of plain torch
structured_report  a prediction as a DICOM structured report
"""
