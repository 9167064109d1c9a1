"""The identity of a campaign: what determines its numbers, kept with it, and compared at every resume.

`classes` (what becomes of a key that changed), `fingerprint` (what a config comes to), `comparison` (two of them) are pure;
`record` reads samples of files and keeps the fingerprint in the run directory, `resume` puts them together.
"""
