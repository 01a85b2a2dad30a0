"""The wizard: a few questions, checked as they are answered, that end in a `Launch`.

`answers`, `model_facts`, `data_facts`, `plan_preview`, `draft` and `launching` know nothing of
Textual; the screen and its steps only draw what those say.
"""
