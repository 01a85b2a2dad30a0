"""The wizard: a few questions, checked as they are answered, that end in a `Launch`.

`answers` and `checks` know nothing of Textual. `engine` asks the trainer. `pages` are functions of
one `WizardView`; `screen` (with its `steps`) shows them, and `linear` asks the same line by line.
"""
