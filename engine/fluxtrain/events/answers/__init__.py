"""The answers of `fluxtrain plan | inspect | probe | dry-run | doctor | export | evaluate --json`
as types, and asking; and the lines that `fluxtrain generate --json` reads and writes.

The commands build these structs and print them; programs ask for them (`asking`).
Needs no torch. A field that a reader does not know is ignored.
"""
