"""How many updates of honest hospitals a run refuses or cuts: every method, on data cut in five ways."""
