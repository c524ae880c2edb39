"""How examples are divided among silos: by class, or by the client (writer, user, centre) whom the data name.

`federations` reads what a run asks for (`p5c2`, `dirichlet-0.5-10`) and says which of the two it is.
"""
