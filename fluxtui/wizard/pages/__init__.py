"""The wizard's pages as functions of a `WizardView` and a width. No state, no widgets."""
