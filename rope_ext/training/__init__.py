"""What a fine-tuning recipe for longer contexts is made of: data, losses, shifted sparse attention, memory."""
