"""`fluxtrain doctor`: probe the machine, judge it, and test the engine on it."""
