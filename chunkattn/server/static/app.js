/** Set up the parts of the page. */

import { setUpDecide } from "./decide.js";
import { byId } from "./dom.js";
import { PromptEditor } from "./editor.js";
import { setUpGenerate } from "./generate.js";
import { setUpInspect } from "./inspect.js";
import { setUpRerank } from "./rerank.js";
import { setUpScore } from "./score.js";
import { setUpStatus } from "./status.js";
import { setUpTabs } from "./tabs.js";

setUpTabs();
const editor = new PromptEditor();
setUpStatus((settings) => {
  editor.separator = settings.separator;
  editor.maxLogprobs = settings.max_logprobs;
  byId("chat-switch").hidden = !settings.chat_template;
  byId("chat").checked = settings.chat_by_default;
});
setUpInspect(editor);
setUpGenerate(editor);
setUpScore();
setUpRerank();
setUpDecide();
