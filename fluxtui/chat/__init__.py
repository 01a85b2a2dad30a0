"""Talk with a trained model: the conversation as a value, its lines, and the screen."""
