"""Read images from a hospital's PACS over DICOMweb (PS3.18): the service lists and fetches, its worker reads.

reference   parses the references that select images
dicomweb    sends the requests, each limited in bytes, results and time
mirror      keeps the fetched images in the home, and one image list per run

Nothing here decodes an image or parses a DICOM object, because this process has network access.
"""
