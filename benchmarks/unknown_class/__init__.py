"""How often an image of a class that no hospital taught is called none of the classes: see README.md."""
