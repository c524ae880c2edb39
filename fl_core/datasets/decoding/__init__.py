"""From a file's bytes to the pixels that are trained on: the same at every hospital, whatever the file is called.

pixels  images that Pillow decodes, of 8 bits or more, and which decoder a file gets
limits  what one file may be at most
dicom   DICOM: modality and VOI rules, photometric interpretation, transfer syntaxes
"""
