"""The commands of the command line beside `train`."""
