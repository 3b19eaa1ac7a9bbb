"""Names of files and folders that more than one room writes or looks for."""

CARD = "card.json"  # what lies beside a trained tunnel's weights
HISTORY = "history"  # the folder in a run's folder that holds what became of its heads, where they were watched
