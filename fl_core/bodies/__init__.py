"""Frozen bodies as ONNX files, without torch: what a graph may be, and the process that tries one.

graph_check  which graphs are run at all, read from the bytes of the file
probe        one image through a graph in a process of its own, with limits of memory and time
"""
