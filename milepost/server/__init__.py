"""The OpenAI-compatible HTTP server: routes, streaming, metrics.

It sees the engine only as `engine.facade.Engine` and the model's text side only as `engine.text.Text`.
"""
