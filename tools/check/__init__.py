"""The sweep of `vitrel check` over models of timm, transformers and torchvision, and the pictures of its page."""
