"""Pictures: heatmaps over photos, pages of panels, filmstrips. Only `plots` uses matplotlib."""
