"""Vision Transformers of timm: network, weights, preprocessing, optimizer and what training adds to them."""
