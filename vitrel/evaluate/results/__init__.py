"""What the rows of an evaluation say: their files, intervals over seeds and images, verdicts, text."""
