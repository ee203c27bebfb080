/** Set up the parts of the page. */

import { PromptEditor } from "./editor.js";
import { setUpGenerate } from "./generate.js";
import { setUpInspect } from "./inspect.js";
import { setUpScore } from "./score.js";
import { setUpStatus } from "./status.js";
import { setUpTabs } from "./tabs.js";

setUpTabs();
setUpStatus();
const editor = new PromptEditor();
setUpInspect(editor);
setUpGenerate(editor);
setUpScore();
