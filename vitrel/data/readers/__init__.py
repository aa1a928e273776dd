"""Images, labels and masks from where users have them: folders, CSVs, tar files, Hugging Face's and torchvision's sets."""
