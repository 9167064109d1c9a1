"""Drawings of a campaign: parts of SVG charts and HTML pages, and the picture and the timeline made of them."""
