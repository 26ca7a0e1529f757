"""WebShop (Yao et al. 2022): search, click and buy in a shop until what an instruction asks for is bought.

A `Catalogue` holds products, goals and a search index. It is read from the original's data files or generated, once a
process, and shared by all its episodes. A `Store` says where a click leads, `views` what an agent sees there, `score`
what a purchase is worth, `Expert` what to do next. `WebShop`, in `shop`, is the environment made of them.
"""
