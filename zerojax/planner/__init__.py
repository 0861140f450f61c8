"""What a step needs before anything is rented: memory, traffic and time of a program compiled for a target GPU.

Reads every other folder; nothing imports it.
"""
