"""Fine-tuning that forgets nothing: structures of a checkpoint's own, labelled by it, and the run that replays them."""
