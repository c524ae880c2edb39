"""Images in a hospital's PACS, reached by DICOMweb (PS3.18): listed and fetched by the service, read by its worker.

reference   what is asked of which PACS, and how it is written
dicomweb    the requests, each with bounds of bytes, results and time
mirror      the fetched images in the home, and the list of them that each run keeps

Nothing here decodes an image, or parses an object: the process that has the network never does.
"""
