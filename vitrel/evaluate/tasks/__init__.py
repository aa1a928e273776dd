"""What is predicted and scored, a file each: classification, segmentation, and classes from frozen features."""
