"""The services of the wire, one file each."""
