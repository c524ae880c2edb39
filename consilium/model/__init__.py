"""Use an exported model without a federation, on one machine.

model_file   the facts in a model file's header; rebuilds the model
calibration  temperature, conformal sets and the threshold for "none of the classes", from a hospital's own examples
conformal    temperature scaling and conformal sets; distances: the score for "none of the classes"
inputs       image files, tables and data by reference as named examples
predictor    probabilities, sets and "none of the classes" for each example
classifier   `consilium.load`: a model with scikit-learn's methods
commands     `consilium calibrate`, `predict` and `page`; output: predictions as CSV, JSON and tables
page/        the page for images
portable     a model as ONNX and as a plain torch program
structured_report  a prediction as a DICOM structured report
"""
