"""The command `consilium`: what is done with an exported model by whoever has it, with or without a membership.

main     the program
predict  calibrate, predict, page
output   predictions as CSV, as JSON, and for people
"""
