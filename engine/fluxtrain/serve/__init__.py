"""The tuning service behind `fluxtrain serve`: files, jobs, models and chat for the openai SDK.

The database knows what was asked (`store`), the run directory what happened. Trainers and the
worker that answers are processes of their own: nothing here imports torch.
"""
