"""One model, computed flat: masks, attention, and the seam with TRL's fused LM head."""
