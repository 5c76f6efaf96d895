"""Other people's trainers, as they are: `harness run --run URL -- script.py` finds out which one a
script uses, and adapts it (docs/trainers/).

Nothing here imports a framework that the script has not imported.
"""
