"""Image editing: pairs of images, encoded once, learned by flow matching."""
