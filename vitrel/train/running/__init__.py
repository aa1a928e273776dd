"""One run of training: its settings checked, its progress shown, its state saved for exact resume, its failures explained."""
