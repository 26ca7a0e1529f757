"""WebShop (Yao et al. 2022): search, click and buy in a shop until the product that an instruction describes is bought.

A `Catalogue` has products, goals and a search index. It is read from the original's data files or generated, once per
process, and shared by all its episodes. `ShopPages` says where a click leads, `views` what an agent sees there, `score`
what a purchase is worth, `ShopOracle` what to do next. `WebShop`, in `env`, is the environment made of them.
"""
