"""jetrl.verify: the rollout's log-probs against the trainer's, and which operator makes them differ.

Three processes, as in a job: the command (no torch), one that runs vLLM, one that runs VeRL's trainer engine. They share
a folder (workspace.py).
"""
