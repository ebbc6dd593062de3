"""Text SFT and DPO without padding: rows outside, a flat tree inside."""
