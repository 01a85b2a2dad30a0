"""Output that a program has not finished yet: its folders, and what ends the program meanwhile."""
