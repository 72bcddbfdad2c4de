"""Building blocks of everything that is shown or saved: text and HTML blocks, tables, pages, versioned JSON.

A plan, a search, an auto-sharding result and a report are each one list of the blocks in `blocks`, from
which both the text and the page are rendered. One color has one meaning (`palette.css`). Everything but
sorting and filtering works without scripts. Nothing is loaded from the network: each page has a content
security policy. Text from the user's tree is data, never markup.
"""
