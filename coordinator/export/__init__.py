"""Models for programs that do not know this one.

portable.py   ONNX, and a program of plain torch: preprocessing in the graph, classes and origin in the file
"""
