"""The command `consilium`: the demo, and commands for an exported model, with or without a membership.

main  the program; its commands are in `consilium.research.commands` and `consilium.model.commands`
"""
