"""The wizard's pages as functions of a `View` and a width. No state, no widgets."""
