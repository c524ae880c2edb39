"""Frozen bodies as ONNX files, without torch: checks of graphs, and the process that tries one.

graph_check  the rules for graphs, checked on the bytes of the file
probe        passes one image through a graph in a separate process, with limits of memory and time
"""
