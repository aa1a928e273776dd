"""What a model does with the places of its tokens, seen from outside: any model of ours or of timm, unchanged."""
