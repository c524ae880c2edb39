"""How examples are divided among silos: by class, or by the client (writer, user, centre) named in the data.

`federations` reads a run's partition (`p5c2`, `dirichlet-0.5-10`) and chooses between the two.
"""
