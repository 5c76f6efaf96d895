"""What tests share: fakes, scenes, simulated systems, kill campaigns. Nothing of it ships."""
