"""The commands of `coordinator`, grouped by who uses them. A command loads its own module and no other."""
