"""What a release is made of: `python -m release dist`, which `make release` runs. Not part of the wheel.

sbom.py    the bill of materials (CycloneDX) of a lock
build.py   wheel, locks, bill of materials and checksums of a commit, the same bytes whenever and wherever it is made
"""
