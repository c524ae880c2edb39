"""The command `consilium`: what is done with an exported model by whoever has it, with or without a membership.

main  the program; its commands lie in `consilium.model.commands`
"""
