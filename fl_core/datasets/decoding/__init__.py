"""From a file's bytes to the pixels for training: the same at every hospital, independent of the file's name.

pixels  images that Pillow decodes, of 8 bits or more, and the choice of the decoder
limits  limits of one file
dicom   DICOM: modality and VOI rules, photometric interpretation, transfer syntaxes
"""
