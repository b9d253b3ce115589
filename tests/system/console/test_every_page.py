"""Every page, wide and narrow, light and dark: it fits, axe-core finds nothing serious, and nothing in it is run."""
