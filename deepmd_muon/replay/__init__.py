"""Fine-tuning that forgets nothing: structures that a checkpoint draws, labels and replays."""
